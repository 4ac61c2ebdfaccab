"""What wraps, or stands in for, the engines of others."""
