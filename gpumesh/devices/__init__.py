"""What this machine can compute with, and how fast. Knows nothing of meshes or tasks."""
