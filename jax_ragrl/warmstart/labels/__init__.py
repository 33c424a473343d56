"""Writers of labels: per system one module with a class `Labeler`, for questions with gold."""
