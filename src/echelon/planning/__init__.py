"""What a run would take on machines that one does not have: from measurements on those that one has."""
