"""What the launchers of TPU VMs and of GKE share: names, commands, sizes and prices, and what the end of a run means."""
