"""The demo: a small GPT that is trained on a short text in pipelines on this machine."""
