"""What each dial of the policy is worth: at its value, neutralised, halved and doubled, over recorded worlds."""
