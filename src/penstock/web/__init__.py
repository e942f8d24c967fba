"""The playground of `penstock play`: a page, and an API that answers with the same functions as the CLI."""
