"""What runs inside a rank: process, mesh, parallel, precision, data, collectives; `accelerator` is its face."""
