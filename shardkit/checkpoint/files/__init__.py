"""What a checkpoint consists of. Nothing here loads torch; plain values: shardkit/values.py.

its parts     layout, manifest, index_json, state_json
on a disk     folder, disk, paths, access
whole?        digest, verify
"""
