"""The right answers to the exercises, the cases that check them, and the mistakes that have a hint: a file a page."""
