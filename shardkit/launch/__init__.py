"""`shardkit launch`: checks and LaunchSpec (without torch), machines and ranks (with torch), diagnosis of failures and
hangs.

before the start   flags; other_launchers, their flags in our words; preflight, spec, environment, names; declining,
                   where a machine cannot come
one launch         attempts, reports, restarts, folders, signals
ranks              ranks, start_methods, forking, preloaded, processes, output, time_use; in each rank: bootstrap,
                   rank_files, phase_clock
machines           meeting, stores, store_client, connectivity, addresses, ports
an elastic run     generations, membership, rosters
failures, hangs    diagnosis, failure; monitor, samples (with stacks) of what ranks do, hangs, hang_texts
a TPU pod          pod
"""
