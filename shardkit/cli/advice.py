"""Errors of the operating system that any command may meet, and what to do about them."""

import errno

FULL = (errno.ENOSPC, errno.EDQUOT)
ADVICE = {
    **dict.fromkeys(FULL, "free some space and try again"),
    **dict.fromkeys((errno.EACCES, errno.EPERM), "check its permissions and those of the folders above it"),
    **dict.fromkeys((errno.EIO, errno.ESTALE), "look at that disk or file system"),
    errno.EROFS: "choose a folder that can be written",
    errno.ENOTDIR: "choose another path: a part of it is a file",
    errno.ENAMETOOLONG: "choose a shorter path",
    errno.EMFILE: "raise the limit: ulimit -n",
}
