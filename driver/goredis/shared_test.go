package goredis_test

import (
	"testing"

	"github.com/fencelock/fencelock/internal/redisbackend"
)

// What is tested of all drivers for Redis; the tests are described where they are.

func TestPush(t *testing.T)                     { redisbackend.GoRedis.TestPush(t) }
func TestSubscriptionComesBack(t *testing.T)    { redisbackend.GoRedis.TestSubscriptionComesBack(t) }
func TestSubscriptionGoesDead(t *testing.T)     { redisbackend.GoRedis.TestSubscriptionGoesDead(t) }
func TestSubscriptionEnds(t *testing.T)         { redisbackend.GoRedis.TestSubscriptionEnds(t) }
func TestOneSubscription(t *testing.T)          { redisbackend.GoRedis.TestOneSubscription(t) }
func TestCloseLeavesNothing(t *testing.T)       { redisbackend.GoRedis.TestCloseLeavesNothing(t) }
func TestPolicyWarning(t *testing.T)            { redisbackend.GoRedis.TestPolicyWarning(t) }
func TestScriptsForgotten(t *testing.T)         { redisbackend.GoRedis.TestScriptsForgotten(t) }
func TestOneRequestPerStep(t *testing.T)        { redisbackend.GoRedis.TestOneRequestPerStep(t) }
func TestOutOfMemory(t *testing.T)              { redisbackend.GoRedis.TestOutOfMemory(t) }
func TestForeignType(t *testing.T)              { redisbackend.GoRedis.TestForeignType(t) }
func TestEvictedParts(t *testing.T)             { redisbackend.GoRedis.TestEvictedParts(t) }
func TestNoOvertaking(t *testing.T)             { redisbackend.GoRedis.TestNoOvertaking(t) }
func TestRefusals(t *testing.T)                 { redisbackend.GoRedis.TestRefusals(t) }
func TestHalfAStep(t *testing.T)                { redisbackend.GoRedis.TestHalfAStep(t) }
func TestUnknownOutcome(t *testing.T)           { redisbackend.GoRedis.TestUnknownOutcome(t) }
func TestNeverSent(t *testing.T)                { redisbackend.GoRedis.TestNeverSent(t) }
func TestOddNames(t *testing.T)                 { redisbackend.GoRedis.TestOddNames(t) }
func TestBigBatch(t *testing.T)                 { redisbackend.GoRedis.TestBigBatch(t) }
func TestBatchItemsAreIndependent(t *testing.T) { redisbackend.GoRedis.TestBatchItemsAreIndependent(t) }
func TestList(t *testing.T)                     { redisbackend.GoRedis.TestList(t) }
func TestOpenIsBounded(t *testing.T)            { redisbackend.GoRedis.TestOpenIsBounded(t) }
func TestCluster(t *testing.T)                  { redisbackend.GoRedis.TestCluster(t) }
func TestSlotMigration(t *testing.T)            { redisbackend.GoRedis.TestSlotMigration(t) }
func TestTLS(t *testing.T)                      { redisbackend.GoRedis.TestTLS(t, true) }
func TestSentinelTLS(t *testing.T)              { redisbackend.GoRedis.TestSentinelTLS(t) }

func TestWrite(t *testing.T)                 { redisbackend.GoRedis.TestWrite(t) }
func TestWriteWhoseReplyIsLost(t *testing.T) { redisbackend.GoRedis.TestWriteWhoseReplyIsLost(t) }
func TestWriteInTheSlot(t *testing.T)        { redisbackend.GoRedis.TestWriteInTheSlot(t) }

func TestMigrationUnderLoad(t *testing.T)  { redisbackend.GoRedis.TestMigrationUnderLoad(t) }
func TestClusterDown(t *testing.T)         { redisbackend.GoRedis.TestClusterDown(t) }
func TestClusterLostReply(t *testing.T)    { redisbackend.GoRedis.TestClusterLostReply(t, true) }
func TestFailoverLosesWrites(t *testing.T) { redisbackend.GoRedis.TestFailoverLosesWrites(t) }
func TestFailoverKeepsLocks(t *testing.T)  { redisbackend.GoRedis.TestFailoverKeepsLocks(t) }
