"""What every part of the package uses: files that are whole or not there, progress, a hook on imports."""
