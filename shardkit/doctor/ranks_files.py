"""How the command and its ranks hand things over: files in the log folder, and a variable."""

OWN = "doctor-machine.json"
"""What the command has found on this machine, for the rank with local rank 0."""
RESULT = "doctor.json"
"""What all machines have found, for the command of each."""
FOLDER = "SHARDKIT_DOCTOR_FOLDER"
"""Where checkpoints and logs will be."""
