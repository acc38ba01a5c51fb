"""What DDP and DataParallel share: the gradients of every step, the handle that users hold, `auto` and the log."""
