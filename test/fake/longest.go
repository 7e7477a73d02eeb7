package fake

import "time"

// LongestBeside calls run, and meanwhile work again and again, with pauses. It returns how long the longest call of work took.
func LongestBeside(work, run func()) (longest time.Duration) {
	done, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		for {
			begin := time.Now()
			work()
			longest = max(longest, time.Since(begin))
			select {
			case <-done:
				return
			case <-time.After(100 * time.Microsecond):
			}
		}
	}()
	run()
	close(done)
	<-ended
	return longest
}
