"""Files of one format to another on one machine, without Spark, in bounded memory."""
