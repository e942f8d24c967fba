"""Private names of torch: the only package, besides the drop-in `penstock.pipelining`, that uses them."""
