"""Speech: transcribers and voices of mlx-audio, beside the batch of text models. One job's window or sentence at a time."""
