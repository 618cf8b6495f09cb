"""The worker's process.

worker         main loop: take a lease, load weights, generate, hand over to the uploader
lease_supply   asks for leases and has their weights fetched, in a background thread
version_cache  policy versions in the worker's folder: fetch, choose, load, delete
uploader       uploads and submits one table at a time, in a background thread; logs verdicts
heartbeat      status and utilisation, and the thread that sends them
session        every request to the coordinator
worker_folder  the files that a worker keeps between starts
"""
