// All of it that a kernel needs is there before its first line.
#pragma once
