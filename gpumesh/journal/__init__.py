"""What a coordinator keeps of script jobs, code, output and events: in a database file, or in memory. Decides nothing about them."""
