"""The processes of a mesh: shells that move bytes, start processes and hold no policy."""
