"""`shardkit launch`: preflight checks and LaunchSpec (no torch), machines and ranks (torch), diagnosis of failures and
hangs."""
