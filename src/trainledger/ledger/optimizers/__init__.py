"""What follows the gradients: clipping, optimizer states and updates, master weights."""
