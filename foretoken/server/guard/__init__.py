"""What stands between the network and the application: keys, Host and Origin, CORS, limits, timeouts."""
