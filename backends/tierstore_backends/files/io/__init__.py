"""What is asked of the kernel, and what is counted: calls, requests, memory that disks reach."""
