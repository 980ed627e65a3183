"""Publishing: entries are staged, whole when they have their name, and pointed at last.

Three things keep two processes apart, each where the others cannot:

lock     by the kernel, for as long as a process works in a folder of this machine, or of a file
         system whose locks reach the others (`conf.storage.locks`)
claim    by a file, for the moment in which a pointer moves on a file system that other machines
         mount and locks may not reach (`pointer`)
lease    by an object with a term, for as long as a process works on a place in a store, which has
         no locks (`lease`)
"""
