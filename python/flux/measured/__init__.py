"""What has been measured on machines like this one, by which plans choose between ways to run an operator."""
