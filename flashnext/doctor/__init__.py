"""What is right and wrong with this machine for serving: facts from `probe`, judged here."""
