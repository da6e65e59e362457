//go:build !linux

package history

func readBase() clockBase { return wallBase() }
