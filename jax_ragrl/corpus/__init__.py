"""What is known and asked: passages, questions, their formats, and the generated encyclopedia."""
