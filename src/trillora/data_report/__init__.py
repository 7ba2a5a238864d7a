"""What `trillora data` says of a recipe's data, before a step is trained: counted in `report`, shown by `terminal` and
`page`."""
