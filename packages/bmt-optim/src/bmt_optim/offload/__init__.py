"""Adam with its states in host memory: copies between device and host, and the thread that steps on
the host.
"""
