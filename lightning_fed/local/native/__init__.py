"""What is written in C, and built with the package where there is a compiler."""
