"""Local steps without Lightning's hooks, for one client at a time."""
