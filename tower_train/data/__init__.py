"""Where examples come from: arrays, idx files, image folders, and files that are downloaded."""
