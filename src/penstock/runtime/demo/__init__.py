"""The demo: a small GPT that learns a page of text in pipelines on this machine."""
