"""The daemon that owns the worker process, its logs and its history."""
