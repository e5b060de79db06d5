"""What tests share: ``from support.<module> import …`` (``tests`` is on the import path)."""
