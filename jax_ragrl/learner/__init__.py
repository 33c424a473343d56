"""The learner: from turns with credit to updated parameters."""
