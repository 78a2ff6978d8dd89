"""`shardkit launch`: preflight and spec (no torch), machines and ranks (torch), diagnosis of failures and hangs."""
