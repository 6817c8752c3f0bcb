"""The training process as a whole: who it is, what it forks, how it ends, and where its threads are."""
