"""ssh: a shell script that starts one `shardkit launch` on each host of a list, in a folder that all hosts share."""

import shlex

from shardkit.config import host_port
from shardkit.submit.job import PEERS_S, Job, configuration_file, folded, head

SSH = ("ssh", "-tt", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=15")
"""-tt: allocates a terminal; if the connection is lost, the launcher gets SIGHUP, saves and stops. A host that does not
answer for 3 x 15 s counts as lost."""


def problems(job: Job) -> list[str]:
    """A mismatch between the number of hosts and the configuration."""
    if len(job.hosts) in (0, job.machines):
        return []
    return [
        f"--hosts: the number of hosts differs from num_machines {job.machines} (got {len(job.hosts)}); "
        f"add --num-machines {len(job.hosts)}, and -n for the total number of ranks."
    ]


def render(job: Job) -> str:
    """The script. It exits with the first exit code that is not 0, and forwards SIGTERM, SIGHUP and Ctrl-C."""
    how = "Run it with: bash FILE, in the folder that all hosts share. SIGTERM and Ctrl-C: save and stop."
    folder = shlex.quote(str(job.folder))
    main = host_port.with_brackets(job.hosts[0].rpartition("@")[2])
    launch = folded(
        [
            "exec",
            *job.launch_words(
                '"$logs/shardkit.yaml"',
                ["--machine-rank", '"$rank"', "--main", '"$main:$port"', "--logs", '"$logs"'],
            ),
        ]
    )
    return f"""#!/bin/bash
{head(job, how)}
ssh=({shlex.join(job.ssh or SSH)})
hosts=({shlex.join(job.hosts)})
main={shlex.quote(main)}
port=$((20000 + RANDOM % 10000))
folder={folder}
there={shlex.quote(folder)} # quoted for a host's shell
cd "$folder" || exit 1
logs=runs/{job.name}-$(date +%Y%m%d-%H%M%S)-$$
mkdir -p "$logs" && mkfifo "$logs/ended" && exec 3<> "$logs/ended" && rm "$logs/ended" || exit 1
{configuration_file(job.configuration, '"$logs/shardkit.yaml"')}

# What a host runs, as a file: its login shell may be one that reads nothing longer (fish, tcsh). `exec` replaces the
# shell by the launcher, so the pid in the file is the launcher's.
{{
    printf 'cd %q || exit 1\nlogs=%q main=%q port=%q rank=$1\n' "$folder" "$logs" "$main" "$port"
    cat <<'END_OF_COMMAND'
if [ "$2" = stop ]; then kill -TERM "$(cat "$logs/$rank.pid")"; exit; fi
echo $$ > "$logs/$rank.pid"
{launch}
END_OF_COMMAND
}} > "$logs/host.sh"
on_host() {{ "${{ssh[@]}}" "${{hosts[$1]}}" "exec bash $there/$logs/host.sh $1 $2" < /dev/null; }}
stop() {{ for rank in "${{!hosts[@]}}"; do on_host "$rank" stop & done; }}
trap stop TERM HUP INT

for rank in "${{!hosts[@]}}"; do
    # Ignore signals to the process group here, so that ssh keeps running and returns the launcher's exit code.
    (trap '' TERM HUP INT; on_host "$rank" start; echo "$rank $?" >&3) &
done
code=0
for ((left = ${{#hosts[@]}}; left > 0; )); do
    read -r rank ended <&3 || continue # a signal
    left=$((left - 1))
    if [ "$code" -eq 0 ] && [ "$ended" -ne 0 ]; then
        code=$ended
        echo "${{hosts[rank]}} ended with code $ended" >&2
        # The other launchers detect a lost one within 30 s and stop. Send SIGTERM to those that do not.
        (sleep {PEERS_S} && stop) > /dev/null 2>&1 3>&- &
        stopper=$!
    fi
done
[ -z "${{stopper:-}}" ] || kill "$stopper"
exit "$code"
"""
