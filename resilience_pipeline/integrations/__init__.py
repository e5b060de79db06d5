"""Other people's libraries: one public module for each, behind an extra, imported by its users alone.

`opentelemetry` and `prometheus` tell these of what happens in pipelines.
"""
