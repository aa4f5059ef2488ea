"""Admission: judges requests before they cost an engine anything. It routes and serves nothing."""
