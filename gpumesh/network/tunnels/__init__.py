"""Ways into a mesh for machines of other networks: tunnels of ngrok, and the addresses of a tailnet."""
