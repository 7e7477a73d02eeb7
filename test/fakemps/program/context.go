package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
)

// NVML's numbers of compute modes.
const (
	modeProhibited = 2
	modeExclusive  = 3
)

var errUnavailable = errors.New("CUDA_ERROR_DEVICE_UNAVAILABLE")

// openContext makes a context on a card, which lasts as long as the process. The compute mode decides whether it may
// (nvidia-smi(1), "Compute Mode"); contexts that exist stay when the mode changes. The file's lock stands for the contexts of the
// card: the kernel releases it when a process ends.
func openContext(card string) error {
	if !knows(card) {
		return errors.New("CUDA_ERROR_NO_DEVICE")
	}
	mode := 0
	if text, err := os.ReadFile(filepath.Join(os.Getenv("FAKE_NVML_STATE"), "modes", card)); err == nil {
		mode, _ = strconv.Atoi(strings.TrimSpace(string(text)))
	}
	kind := syscall.LOCK_SH
	switch mode {
	case modeProhibited:
		return fmt.Errorf("%w: the compute mode is PROHIBITED", errUnavailable)
	case modeExclusive:
		kind = syscall.LOCK_EX
	}
	dir := filepath.Join(os.Getenv("FAKE_MPS"), "contexts")
	if err := os.MkdirAll(dir, 0o777); err != nil {
		return err
	}
	file, err := os.OpenFile(filepath.Join(dir, card), os.O_CREATE|os.O_RDWR, 0o666)
	if err != nil {
		return err
	}
	if err := syscall.Flock(int(file.Fd()), kind|syscall.LOCK_NB); err != nil {
		return fmt.Errorf("%w: another process has the card", errUnavailable)
	}
	held = append(held, file)
	return nil
}

// held keeps files open until the process ends.
var held []*os.File
