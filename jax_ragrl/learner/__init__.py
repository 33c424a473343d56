"""The learner: from rollouts with credit to updated parameters."""
