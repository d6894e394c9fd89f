"""A day of many replicas, from the measured curves of one: by the share of replicas with n requests, not by request."""
