"""`shardkit launch`: preflight and spec (no torch), elastic (torch), diagnosis of failures and hangs."""
