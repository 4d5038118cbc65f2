"""``lightning-fed deploy``: the processes of a real federation, and what starts them."""
