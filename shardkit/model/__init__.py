"""What is known of a model: its module tree, its FSDP units, its weights; torch is loaded only to build one."""
