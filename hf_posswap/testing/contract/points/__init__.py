"""The points of the contract: each is a promise, and the function that checks it on one pair."""
