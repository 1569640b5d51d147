"""The federated loop and the interface of its plugins."""
